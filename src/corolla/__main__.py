"""`python -m corolla` is the command line."""

from corolla.apps.cli.main import main

if __name__ == "__main__":
    main()
