"""``python -m geodl``."""

from geodl.cli import main

if __name__ == "__main__":
    main()
