"""`python -m datasync`: the command line, where only the interpreter is on the path."""

from datasync.cli import main

if __name__ == "__main__":
    main()
