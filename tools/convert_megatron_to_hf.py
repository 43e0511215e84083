"""Convert a model of a Megatron checkpoint into a Hugging Face directory: `megarl convert megatron-to-hf` as a script."""

import sys

from megarl.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", "megatron-to-hf", *sys.argv[1:]]))
