# SPDX-License-Identifier: Apache-2.0
"""`python -m triton_omni_client` is the command `triton-omni`."""

from triton_omni_client.cli import main

if __name__ == "__main__":
    main()
