"""The command line: its verbs' arguments, `config`, `init` and `data`."""
