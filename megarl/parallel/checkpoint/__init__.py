"""Distributed checkpoints: models, their optimizers and random states of all ranks in one step directory, on any layout.

    saver = Saver(root, grid, settings)                      # on every rank, once
    saver.save(step, {"policy": ModelState(chunks, hf, trainable), "critic": ...}, {"trainer.json": b"..."})
    saver.wait()                                             # before the end; raises what went wrong behind
    load(verified, {"policy": ModelState(...)}, grid)        # any layout; one without its optimizer loads the weights alone
    load_random(verified, grid)                              # the same layout: from here on, bit for bit

A step directory (`megarl.checkpoints.steps`): `<name>/` in Megatron's torch_dist format for each model, with `hf/` inside that says what it
is (config.json, tokenizer), `random/<rank>.safetensors`, the caller's own files (rank 0's), and the manifest.
"""
