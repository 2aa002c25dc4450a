# SPDX-License-Identifier: Apache-2.0
"""Between the stages and Triton."""
