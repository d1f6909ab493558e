"""What looks like a secret is taken out of messages, and nothing else."""

import pytest

from azureml_elastic.masking import masked


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("python train.py --key abc --lr 0.1", "python train.py --key *** --lr 0.1"),
        ("train.py --api-key='a b' x", "train.py --api-key=*** x"),
        ('train.py --hf_token "a \\" b" x', "train.py --hf_token *** x"),
        ("WANDB_API_KEY=abc python train.py", "WANDB_API_KEY=*** python train.py"),
        ("-e AZURE_STORAGE_CONNECTION_STRING='A=b;AccountKey=c=='", "-e AZURE_STORAGE_CONNECTION_STRING=***"),
        ("AccountKey=abc==;x", "AccountKey=***;x"),
        ("https://a.blob.core.windows.net/c?sv=1&sig=x end", "https://a.blob.core.windows.net/c?*** end"),
        ("https://me:pw@host/x", "https://***@host/x"),
        ("a SECRET2=b", "a SECRET2=***"),
    ],
)
def test_secrets_are_masked(text, shown):
    assert masked(text) == shown
    assert masked(shown) == shown


@pytest.mark.parametrize(
    "text",
    [
        "python train.py --tokenizer bert --monkey 3 --keys-only",
        "torchrun --nproc_per_node 4 train.py --data ${{inputs.data}}",
        "--token --lr 3",
        "python -m pip install 'a>=1' && python train.py > log?",
        "KEYBOARD=us BASKET=1 train.py",
        "azureml://datastores/workspaceblobstore/paths/x/",
    ],
)
def test_what_is_no_secret_stays(text):
    assert masked(text) == text
