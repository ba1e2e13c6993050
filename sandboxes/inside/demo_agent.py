"""The ``demo`` harness: a small ACP agent without a model, driven by commands in the prompt text.

Run as ``python3 -I -S demo_agent.py``; ``/help`` in a prompt lists the commands.
"""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from demo.agent import main

if __name__ == "__main__":
    main()
