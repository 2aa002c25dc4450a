# SPDX-License-Identifier: Apache-2.0
"""Code that both vLLM engines use."""
