# SPDX-License-Identifier: Apache-2.0
"""The commands of `triton-omni` that have a file of their own; `cli.py` puts them together."""
