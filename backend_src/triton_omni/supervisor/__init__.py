# SPDX-License-Identifier: Apache-2.0
"""The program outside Triton that starts, watches, restarts and stops one tritonserver."""
