"""What is observed of the images: figures of pairs, checks of requests, loads."""
