"""``python -m diloco_ops.wan --config FILE``: the relay as ``diloco up`` starts it beside its services."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from diloco.process import observe
from diloco_ops.wan.wan_command import serve


def _main() -> int:
    parser = argparse.ArgumentParser(prog="diloco_ops.wan")
    parser.add_argument("--config", type=Path, required=True)
    serve(parser.parse_args().config)
    return 0


if __name__ == "__main__":
    sys.exit(observe.run_main(_main, "diloco wan"))
