# SPDX-License-Identifier: Apache-2.0
"""Thinker and talker as in-process vLLM engines; the only package that imports vLLM, always through `compat.py`."""
