# SPDX-License-Identifier: Apache-2.0
"""The talker's vLLM engine."""
