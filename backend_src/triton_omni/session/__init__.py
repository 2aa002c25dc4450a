# SPDX-License-Identifier: Apache-2.0
"""One request on its way through all stages: messages, the ledger, the loop that owns a stage."""
