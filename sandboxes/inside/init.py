"""The cell init: owns one agent and everything it starts, until its control channel ends (DESIGN 3.10).

Run as ``python3 -I -S init.py --control-fd N``; ``cell/control.py`` says what goes over the channel.
"""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from cell.control import main

if __name__ == "__main__":
    main(sys.argv[1:])
