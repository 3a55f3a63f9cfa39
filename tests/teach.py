"""teach.py - a tiny model that was taught to answer yes to kind replies and no to cold ones: a reader
(players/reader.py) for tests that have no large one.

    python tests/teach.py DIR
"""

import sys
from pathlib import Path

sys.path[:0] = map(str, (Path(__file__).resolve().parent.parent, Path(__file__).resolve().parent))
from players.local import LocalReader
from players.reader import Reader, known_replies

from types import SimpleNamespace

import torch
import torch.nn.functional as F

import conftest

YES_NO = ("yes", "no")


def questions_of(row):
    """The prompts about the reply of a row of `known_replies`."""
    return Reader(SimpleNamespace(name="nobody")).questions(row["profile"], row["dialogue"])


def teach(path):
    """Make the model in the directory `path`."""
    tokenizer = conftest.make_tiny_tokenizer(YES_NO)
    torch.manual_seed(0)
    # a head of 32 numbers: vLLM's CPU attention knows no smaller ones
    model = conftest.make_tiny_model(
        tokenizer, num_attention_heads=1, num_key_value_heads=1, max_position_embeddings=4096
    )
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    chat = LocalReader(path, YES_NO).chat
    yes, no = (chat.text(word)[0] for word in YES_NO)
    rows = [row for row in known_replies("weights") if row["kind"] in ("generic warm", "cold")]
    ids = [torch.tensor(chat.first_prompt(questions_of(row)[0])) for row in rows]
    ends = torch.tensor([len(row) - 1 for row in ids])
    # padded on the right: what is causal does not see it
    ids = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    wanted = torch.tensor([no if row["kind"] == "cold" else yes for row in rows])
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(30):
        hidden = model.model(ids).last_hidden_state[range(len(ids)), ends]
        F.cross_entropy(model.lm_head(hidden), wanted).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(path)


if __name__ == "__main__":
    teach(sys.argv[1])
