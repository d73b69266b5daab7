"""`python -m placewright` is the command `placewright`."""

from placewright.cli import main

if __name__ == "__main__":
    main()
