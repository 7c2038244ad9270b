"""Models in a folder with their recipe's weights: writing one, checking one, reading it without quantising again."""
