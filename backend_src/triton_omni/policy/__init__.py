# SPDX-License-Identifier: Apache-2.0
"""Rules for a GPU that thinker, talker and token2wav share. Each decides from a snapshot of what is there.

| Rule | Decides | In the process of |
|---|---|---|
| claim | thinker and talker start no step while a stream has an empty playback buffer | token2wav |
| pause | the thinker starts no step while first windows wait only for later stages | thinker |
| urgent batch | which due windows share a batch, and which go before a batch that is being launched | token2wav |

`core/policy_settings.py` has the limits. The rules know no engine, no ledger and no clock: times are arguments.
One keeps a state, `Claim`: when its last claim began and ended, since a claim gets at most half of the time.
`scripts/simulate_policy` runs the same rules on a model of the GPU.
"""
