# SPDX-License-Identifier: Apache-2.0
"""`python -m training`."""

from training.run import main

main()
