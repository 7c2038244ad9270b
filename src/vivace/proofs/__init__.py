"""`vivace prove`: does a faster side still draw the same images, as good ones, and follow its requests?

Two sides are compared image by image, A being the reference: recipes, folders, Python functions, images endpoints,
ComfyUI servers. `sides` parses them, `prepare_sides` prepares them; `recipe_drawer`, `folder`, `function`, `endpoint`
and `comfyui` draw, `proof_store` keeps the images. `proving` puts the steps together; `same`, `as_good`, `legible`,
`server_checks` and `fast` answer the questions.
"""
