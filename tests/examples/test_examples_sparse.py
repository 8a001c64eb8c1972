"""The examples with sparse tables in a short form, on generated data: beside the same model in one process, without psd."""

from __future__ import annotations

import argparse
import gzip
import importlib
import json
import os
import re
import zipfile
from pathlib import Path

import numpy as np
import pytest
from loaded_programs import WITH_TORCH, completed

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(*command: str) -> str:
    """Standard output of a Python program, which must succeed."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PSD_")}
    done = completed(command, env=environ, loads=WITH_TORCH, generations=1)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def both(script: str, consistency: str, batch_size: int, *flags: str) -> tuple[dict, dict, str]:
    """Results of two workers on two shards, and of one process with batches twice as large; the workers' output."""
    path = str(EXAMPLES / script)
    output = run(
        "-m", "psd.cli.run", "--shards", "2", "--workers", "2", "--consistency", consistency,
        path, "--batch-size", str(batch_size), *flags,
    )  # fmt: skip
    plain = run(path, "--plain", "--batch-size", str(2 * batch_size), *flags)
    return result(output), result(plain), output


def result(output: str) -> dict:
    return json.loads(output.partition("result ")[2].splitlines()[0])


@pytest.mark.process
def test_sparse_lr_moves_few_bytes_and_learns_what_one_process_does():
    """Weights begin as zeros, so that synchronous training is the same but for rounding."""
    trained, plain, _ = both("sparse_lr.py", "sync", 4, "--epochs", "1")

    assert trained["steps"] == plain["steps"] == 400
    assert trained["auc"] == pytest.approx(plain["auc"], abs=0.001)
    assert trained["auc"] > 0.8
    assert trained["bytes_per_step"] * 20 < trained["dense_bytes_per_step"]


@pytest.mark.process
def test_matrix_factorization_reaches_the_error_of_one_process():
    trained, plain, output = both("matrix_factorization.py", "sync", 100, "--epochs", "4")

    assert trained["test_rmse"] == pytest.approx(plain["test_rmse"], rel=0.03)  # other initial values
    assert trained["test_rmse"] < 1.3
    assert "epoch   4 of 4  test RMSE" in output


@pytest.mark.process
def test_dlrm_reaches_what_one_process_does():
    """TorchRec's model, with a table for each of 26 categories, which come in one round trip."""
    pytest.importorskip("torch")

    trained, plain, output = both("dlrm.py", "sync", 64, "--rows", "3000", "--epochs", "2")

    assert "generated: 2400 rows for 2 workers" in output
    assert trained["steps"] == plain["steps"] == 36
    assert trained["auc"] == pytest.approx(plain["auc"], abs=0.08)  # other initial values
    assert trained["auc"] > 0.75


@pytest.mark.process
def test_word2vec_asynchronously_puts_words_of_a_topic_side_by_side():
    trained, plain, output = both("word2vec.py", "async", 500, "--epochs", "1")

    assert trained["loss"] == pytest.approx(plain["loss"], rel=0.02)
    near = re.findall(r"near ([a-z]+)\d+: (.*)", output)
    assert len(near) == 4
    same = [re.match("[a-z]+", word)[0] == topic for topic, words in near for word in words.split()]
    assert sum(same) >= 20
    assert len(same) == 24


def test_ctr_synchronously_ends_where_one_process_does(example, run_workers):
    """Tensors and rows both: DeepFM by psd on two workers and two shards, and by torch alone on the joined batches."""
    torch = pytest.importorskip("torch")
    psd = pytest.importorskip("psd_client.torch")
    ctr, sparse_data = example("ctr"), example("sparse_data")
    data = sparse_data.generated_categories(400)
    ids = torch.from_numpy(data.ids.view(np.int64))
    alone = ctr.DeepFM(ctr.KnownIds(ids, 5), ids.shape[1], 4)

    def rows(model):
        return model.embedding(alone.embedding.known).detach().clone()

    def train(ps):
        model = ctr.DeepFM(psd.Embedding("categories", 5, init=psd_init), ids.shape[1], 4)
        model.deep.load_state_dict(deep)
        optimizer = psd.distribute(model, torch.optim.Adagrad(model.parameters(), lr=0.05), ps=ps)
        start = rows(model)
        batches = sparse_data.batches(320, 16, 2, ps.rank, ps.world_size)
        steps, _ = ctr.fit(model, optimizer, data, ids, batches, shows=False)
        optimizer.pull()
        return steps, start, rows(model), [parameter.detach().clone() for parameter in model.deep.parameters()]

    psd_init = importlib.import_module("psd_client").Normal(std=0.1)
    deep = {name: value.clone() for name, value in alone.deep.state_dict().items()}
    (steps, start, end, trained), other = run_workers(2, 2, train)
    assert torch.equal(end, other[2])

    with torch.no_grad():
        alone.embedding.rows.weight.copy_(start)
    optimizer = torch.optim.Adagrad(alone.parameters(), lr=0.05)
    assert ctr.fit(alone, optimizer, data, ids, sparse_data.batches(320, 32, 2, 0, 1), shows=False)[0] == steps == 20

    assert (end - start).abs().max() > 0.1
    torch.testing.assert_close(end, rows(alone), rtol=1e-3, atol=1e-4)
    for parameter, expected in zip(trained, alone.deep.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected.detach(), rtol=1e-3, atol=1e-4)


def test_batches_of_all_workers_are_those_of_one_process(example):
    sparse_data = example("sparse_data")

    parts = [list(sparse_data.batches(103, 5, 2, rank, 4)) for rank in range(4)]
    whole = list(sparse_data.batches(103, 20, 2, 0, 1))

    assert [np.concatenate(of_step).tolist() for of_step in zip(*parts, strict=True)] == [batch.tolist() for batch in whole]
    assert len(whole) == 10
    with pytest.raises(ValueError, match="4 workers with 30 each need 120 training examples; there are 103"):
        next(sparse_data.batches(103, 30, 1, 0, 4))


def test_auc_is_the_share_of_pairs_in_order(example):
    rng = np.random.default_rng(0)
    labels, scores = rng.integers(0, 2, 50), rng.integers(0, 8, 50)  # with many that are equal

    ones, zeros = scores[labels == 1][:, None], scores[labels == 0]

    assert example("sparse_data").auc(labels, scores) == pytest.approx(((ones > zeros) + (ones == zeros) / 2).mean())


def test_published_files_are_read_as_they_are(example, tmp_path):
    """A few lines in the format of each."""
    data = example("sparse_data")
    rows = tmp_path / "ads.gz"
    rows.write_bytes(gzip.compress(b"+1 3:1 17:0.5 \n-1 2:1\n1\n"))
    assert [array.tolist() for array in data.libsvm(rows)] == [[1, 0, 1], [0, 2, 3, 3], [3, 17, 2], [1, 0.5, 1]]
    assert [array.tolist() for array in data.libsvm(rows).take(np.array([2, 0]))] == [[1, 1], [0, 0, 2], [3, 17], [1, 0.5]]

    stays = "encounter_id,patient_nbr,race,age,readmitted\n7,5,?,[0-10),<30\n8,6,A,[0-10),>30\n"
    with zipfile.ZipFile(tmp_path / "stays.zip", "w") as archive:
        archive.writestr("dataset_diabetes/diabetic_data.csv", stays)
    found = data.categories(tmp_path / "stays.zip")
    assert (found.labels.tolist(), found.is_test.tolist()) == ([1, 0], [True, False])
    hashed = importlib.import_module("psd_client").hash_ids
    assert found.ids.tolist() == [hashed(["race=?", "age=[0-10)"]).tolist(), hashed(["race=A", "age=[0-10)"]).tolist()]

    log = tmp_path / "random" / "men"
    log.mkdir(parents=True)
    shown = ",timestamp,item_id,position,click,propensity_score,user_feature_0\n0,now,1,3,1,0.1,f00\n"
    (log / "men.csv.gz").write_bytes(gzip.compress(shown.encode()))
    (log / "item_context.csv").write_text(",item_id,item_feature_0,item_feature_1\n0,0,-0.5,a\n1,1,-0.7,b\n")
    found = data.categories(log)
    names = ["item_id=1", "position=3", "user_feature_0=f00", "item_feature_0=-0.7", "item_feature_1=b"]
    assert (found.name, found.ids.tolist()) == ("open-bandit random men", [hashed(names).tolist()])

    (tmp_path / "ratings.dat").write_text("1::0111161::10::1363245118\n2::1074638::8::1363245118\n")
    found = data.ratings(tmp_path / "ratings.dat")
    assert sorted(zip(found.users, found.items, found.ratings, strict=True)) == [(1, 111161, 10), (2, 1074638, 8)]

    (tmp_path / "text").write_text("the cat and\nthe dog and the end")
    found = data.corpus(tmp_path / "text", min_count=2)
    assert (found.words, found.text.tolist()) == (["the", "and"], [0, 1, 0, 1, 0])


def test_file_of_another_format_is_named(example, tmp_path):
    (tmp_path / "other").write_text("this is no data\n")

    with pytest.raises(ValueError, match="other is not a libsvm file: expected lines such as"):
        example("sparse_data").libsvm(tmp_path / "other")


@pytest.mark.process
def test_lbfgs_logistic_reaches_the_objective_of_scipy(example):
    output = run("-m", "psd.cli.run", "--shards", "1", "--workers", "2", str(EXAMPLES / "lbfgs_logistic.py"))

    logistic, data = example("lbfgs_logistic"), example("sparse_data")
    _, rows, _ = data.sparse_rows(None, None)
    loss_and_grad = logistic.logistic_loss(logistic.matrix(rows, 20_001), rows.labels)
    args = argparse.Namespace(l2=1.0, iterations=500, tolerance=1e-8)
    assert result(output)["objective"] == pytest.approx(logistic.alone(loss_and_grad, 20_001, args).fun, rel=1e-6)
    assert result(output)["auc"] > 0.9
    assert "converged" in output


def test_lda_reaches_the_perplexity_of_one_process_with_every_token_counted(example, run_workers, capsys):
    """And goes on where it was: the same job once more has no token without a topic, and nothing to sample."""
    lda, data = example("lda"), example("sparse_data").generated_documents()
    args = argparse.Namespace(topics=20, sweeps=60, alpha=0.1, beta=0.01, report=20, seed=1)

    first, second = run_workers(2, 2, lambda ps: [lda.work(ps, data, args), lda.work(ps, data, args)])

    plain = lda.alone(data, args)["perplexity"]
    for found in first:
        assert found["perplexity"] == pytest.approx(plain, rel=0.02)
        assert (found["counted"], found["is_exact"]) == (24_000, True)
    assert [found["perplexity"] for found in first] == [found["perplexity"] for found in second]
    assert len(re.findall(r"worker \d of 2: [\d,]+ tokens/s", capsys.readouterr().out)) == 2


def test_topics_are_sampled_as_collapsed_gibbs_sampling_does(example):
    """The topic of one token, over and over: as often as its probability, given all others."""
    rng, token, topics = np.random.default_rng(3), 17, 7
    documents, words = np.sort(rng.integers(5, size=300)), rng.integers(9, size=300)
    of_token = rng.integers(topics, size=300)
    sampler = example("topic_sampler").TopicSampler(documents, words, of_token, 9, topics, alpha=0.3, beta=0.2)
    others = np.arange(300) != token
    in_document = np.bincount(of_token[others & (documents == documents[token])], minlength=topics)
    in_word = np.bincount(of_token[others & (words == words[token])], minlength=topics)
    weights = (in_document + 0.3) * (in_word + 0.2) / (np.bincount(of_token[others], minlength=topics) + 9 * 0.2)

    drawn = np.bincount(sampler.proposed(np.full(50_000, token), rng, rounds=20), minlength=topics)

    np.testing.assert_allclose(drawn / 50_000, weights / weights.sum(), atol=0.01)


def test_documents_of_uci_are_read(example, tmp_path):
    path = tmp_path / "docword.txt.gz"
    path.write_bytes(gzip.compress(b"2\n5\n3\n1 4 2\n2 1 1\n2 5 1\n"))

    found = example("sparse_data").documents(path)

    assert (found.documents.tolist(), found.words.tolist()) == ([0, 0, 1, 1], [3, 3, 0, 4])
    assert (found.document_count, found.word_count) == (2, 5)
    path.write_bytes(gzip.compress(b"2\n5\n3\n1 4 2\n"))
    with pytest.raises(ValueError, match=r"docword.txt.gz is no bag of words: expected three counts"):
        example("sparse_data").documents(path)
