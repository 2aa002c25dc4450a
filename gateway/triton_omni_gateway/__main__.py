# SPDX-License-Identifier: Apache-2.0
"""`python -m triton_omni_gateway`: the same as the command `triton-omni-gateway`."""

import sys

from .server import main

sys.exit(main())
