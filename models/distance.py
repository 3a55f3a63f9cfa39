"""models/distance.py - how far the policy has moved from where it started, without a second model
in memory: a few dialogues of the starting policy are kept, and scored again by the policy of today.
"""

from models.loading import load_tensors
from support.files import write_whole
from support.ranks import all_gather_list, all_reduce_sum, on_first_rank, rank, world_size

from functools import partial
from operator import attrgetter

import torch

from policy import Batch, dummy_batch, pack
from ppo import kl_penalty, log_probs_of

START_DIALOGUES = 8  # of the starting policy


class DistanceFromStart:
    """KL(pi_0, pi), estimated from a few dialogues of the starting policy pi_0 in the file `path`,
    each a batch of its own with the log-probs that pi_0 gave its tokens."""

    def __init__(self, policy, device, path):
        self.policy, self.device, self.path = policy, device, path

    def keep(self, episodes):
        """Write the first of these episodes of pi_0, over all ranks, to the file, and read it."""
        episodes = all_gather_list(episodes[:START_DIALOGUES])
        episodes = sorted(episodes, key=attrgetter("number"))[:START_DIALOGUES]
        pairs = []
        for episode in episodes:
            batch = pack([episode])
            [log_probs] = log_probs_of(self.policy, [batch.to(self.device)])
            del batch.number  # files of earlier versions have none, and nothing here needs it
            pairs.append((vars(batch), log_probs.cpu()))
        on_first_rank(write_whole, self.path, partial(torch.save, pairs))
        self.read()

    def read(self):
        """Read this rank's part of the file: [(Batch, log-probs of pi_0)]. Every rank gets equally
        many, empty ones if need be, because a forward pass is a collective call. Only the first
        rank needs the file."""
        pairs = on_first_rank(load_tensors, self.path)
        empty = dummy_batch()
        while len(pairs) % world_size():
            pairs.append((vars(empty), empty.engine_log_probs))
        self.dialogues = [
            (Batch(**{**tensors, "number": tensors["group"]}), log_probs)
            for tensors, log_probs in pairs[rank() :: world_size()]
        ]

    def kl(self):
        """KL(pi_0, pi) per token, estimated by k3 from the samples of pi_0."""
        sums = torch.zeros(2, dtype=torch.float64)
        for batch, start_log_probs in self.dialogues:
            [log_probs] = log_probs_of(self.policy, [batch.to(self.device)])
            k3 = kl_penalty(start_log_probs, log_probs.cpu(), "k3")[batch.action_mask]
            sums += torch.tensor([k3.double().sum().item(), k3.numel()])
        kl, tokens = all_reduce_sum(sums).tolist()
        return kl / max(1, tokens)
