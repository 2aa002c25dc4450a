# SPDX-License-Identifier: Apache-2.0
"""Kernels of decode steps in the Triton language."""
