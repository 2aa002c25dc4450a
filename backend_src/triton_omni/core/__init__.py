# SPDX-License-Identifier: Apache-2.0
"""What every part uses and that knows none of them: errors, settings, devices, metrics, events, traces."""
