"""python -m nybble.service"""

from nybble.service.cli import main

if __name__ == "__main__":
    main()
