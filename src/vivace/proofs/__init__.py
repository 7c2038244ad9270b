"""`vivace prove`: does a faster side still draw the same images, as good ones, and follow its requests?

Two sides are compared image by image, A being the reference. `sides` are what draws: a recipe, a folder, a function, an
images endpoint, a ComfyUI server; their plan, and the store of their images. `checks` are what is observed of the
images and the requests. `verdicts` answer the questions. `prover` goes through them in this order.
"""
