"""Distributed checkpoints: the models, optimizers and random states of all ranks in one step directory, loadable on any layout.

    saver = Saver(root, grid, settings)                      # on every rank, once
    saver.save(step, {"policy": ModelState(chunks, description, trainable), "critic": ...}, {"trainer.json": b"..."})
    saver.wait()                                             # before the end; raises what went wrong in the background
    load(verified, {"policy": ModelState(...)}, grid)        # on any layout; without `trainable`, loads the weights only
    load_random(verified, grid)                              # on the same layout, the run then repeats bit for bit

A step directory (`megarl.checkpoints.steps`) holds for each model `<name>/` in Megatron's torch_dist format, with `hf/` inside that
describes it (config.json, tokenizer); `random/<rank>.safetensors`; the caller's own files (rank 0's); and the manifest.
"""
