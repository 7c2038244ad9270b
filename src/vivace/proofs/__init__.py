"""`vivace prove`: does a faster side still draw the same images, as good ones, and follow its requests?

Two sides are compared image by image, A being the reference: recipes, folders, Python functions, images endpoints,
ComfyUI servers. `sides` reads how they are written, `sources` prepares them; `recipe`, `folder`, `function`, `endpoint`
and `comfyui` draw, `store` keeps what was drawn. `proving` puts the steps together; `same`, `as_good` and `checks`
answer the questions.
"""
