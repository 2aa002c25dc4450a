# SPDX-License-Identifier: Apache-2.0
"""Code inside Triton's processes: the models, and all that knows Triton's Python backend."""
