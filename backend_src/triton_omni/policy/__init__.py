# SPDX-License-Identifier: Apache-2.0
"""Which stage may use the device first."""
