"""Foreign input: files, text, and the errors that libraries raise about them.

Everything that comes from outside (models, scorers, LoRAs, prompt files, images) is read through this package.
`files` opens only regular files of bounded size and turns whatever a library raises meanwhile into one of vivace's
errors; `image_files` opens only images of bounded size; `streams` makes foreign text harmless where it is printed.
"""
