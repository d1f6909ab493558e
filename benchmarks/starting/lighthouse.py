"""torchft's lighthouse, which takes its options from the words after a script's name."""

from __future__ import annotations

from torchft._torchft import lighthouse_main

if __name__ == "__main__":
    lighthouse_main()
