# SPDX-License-Identifier: Apache-2.0
"""The command `triton-omni`, which is `python -m triton_omni_client` too."""

from triton_omni_client.interrupt import ending_at_once


def main() -> None:
    """The console script."""
    with ending_at_once():
        from triton_omni_client.cli import main as run  # half a second
    run()


if __name__ == "__main__":
    main()
