# SPDX-License-Identifier: Apache-2.0
"""The micro benchmark: each stage alone against a reference in the same run; `python scripts/micro --help`.

Every measurement is a child process of its own, so that memory is freed and vLLM starts clean.
"""
