# SPDX-License-Identifier: Apache-2.0
"""The thinker's vLLM engine."""
