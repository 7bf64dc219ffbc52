"""Distils a reward model into a smaller one: the same as `tridentrl distill-rm`, whose --help lists the flags."""

import sys

from tridentrl.trainer.distill_command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
