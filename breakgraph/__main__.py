"""``python -m breakgraph``."""

from breakgraph.cli import main

if __name__ == "__main__":
    main()
