# SPDX-License-Identifier: Apache-2.0
"""How rows and codes travel from one stage to the next: by messages of the ensemble, or by a shared ring."""
