"""reference.py - what is kept of the starting policy: the reference of a KL in the loss
(Reference), and a few of its dialogues, which measure the distance from it when its weights are not
in memory (DistanceFromStart).
"""

from support.loading import load_tensors
from support.ranks import all_gather_list, all_reduce_sum, broadcast, rank, world_size

import math
import os
from operator import attrgetter

import torch

from policy import Batch, dummy_batch, pack
from ppo import kl_penalty, log_probs_of

START_DIALOGUES = 8  # of the starting policy, for DistanceFromStart


class Reference:
    """pi_ref as ppo.py and grpo.py call it: batch -> (log pi_ref, None). Each pass also adds to the
    sums of ref_perplexity."""

    def __init__(self, policy):
        """policy: a Policy, or the reference's AdapterView, that is never trained."""
        self.policy = policy
        self.sums = torch.zeros(2, dtype=torch.float64)  # negative log-likelihood, tokens

    def __call__(self, batch):
        """(log pi_ref [B, L], None) of a Batch."""
        log_probs, log_probs_at_1 = self.policy(batch, as_reference=True)
        at_actions = log_probs_at_1[batch.action_mask].double()
        self.sums += torch.tensor([-at_actions.sum().item(), at_actions.numel()])
        return log_probs, None  # where a policy has its entropy

    def perplexity_of(self, batches):
        """`take_perplexity` of these batches."""
        log_probs_of(self, batches)
        return self.take_perplexity()

    def take_perplexity(self):
        """exp of the mean negative log-likelihood of the policy's tokens under pi_ref, at
        temperature 1 and given the dialogue, over all passes of all ranks since the last call. It
        shows how unusual the tokens are for the starting policy. None if there were no
        tokens."""
        negative_log_likelihood, tokens = all_reduce_sum(self.sums).tolist()
        self.sums = torch.zeros(2, dtype=torch.float64)
        return math.exp(negative_log_likelihood / tokens) if tokens else None


class DistanceFromStart:
    """How far the policy has moved: KL(pi_0, pi), estimated from a few dialogues of the starting
    policy in the file `path`, each a batch of its own with the log-probs that pi_0 gave its tokens.
    So the starting policy need not stay in memory."""

    def __init__(self, models, path):
        self.policy, self.device, self.pad = models.policy, models.device, models.pad
        self.path = path

    def keep(self, episodes):
        """Write the first of these episodes, over all ranks, to the file, and read it."""
        episodes = all_gather_list(episodes[:START_DIALOGUES])
        episodes = sorted(episodes, key=attrgetter("number"))[:START_DIALOGUES]
        kept = []
        for episode in episodes:
            batch = pack([episode], self.pad)
            [log_probs] = log_probs_of(self.policy, [batch.to(self.device)])
            kept.append((vars(batch), log_probs.cpu()))
        if rank() == 0:
            scratch = self.path.with_name(f".{self.path.name}")  # nobody ever finds half a file
            torch.save(kept, scratch)
            os.replace(scratch, self.path)
        self.read()

    def read(self):
        """Read this rank's part of the file: [(Batch, log-probs of pi_0)]. Every rank gets equally
        many, empty ones if need be, because a forward pass is a collective call. Only the first
        rank needs the file. Raises BadInput if it is not whole."""
        kept = broadcast(load_tensors, self.path)
        empty = dummy_batch(self.pad)
        while len(kept) % world_size():
            kept.append((vars(empty), empty.engine_log_probs))
        self.dialogues = [
            (Batch(**tensors), log_probs) for tensors, log_probs in kept[rank() :: world_size()]
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
