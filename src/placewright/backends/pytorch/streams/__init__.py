"""One GPU as several devices: a module as groups of kernels on streams, captured as one CUDA graph.

`net` traces the module, `passes` simplifies what it traced, `groups` says which ops go together,
`kernels` which kernels there are for each group, `schedule` which stream each is on, `issue` runs
them so that no stream reads memory that another one has given back, and `built` is the result: it
takes inputs and gives outputs. `plan` is what of all that can be saved.
"""
