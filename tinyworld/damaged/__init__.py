"""What damage does to images, a file for each kind: colours, places, details, contents.

Images are uint8 arrays (N, 128, 128, 3). What a damage does to an image depends on the image, its prompt and its place
in the list alone.
"""
