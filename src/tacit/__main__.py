"""`python -m tacit` is the command."""

from tacit.cli import main

if __name__ == "__main__":
    main()
