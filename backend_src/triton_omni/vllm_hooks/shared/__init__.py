# SPDX-License-Identifier: Apache-2.0
"""What both vLLM engines use."""
