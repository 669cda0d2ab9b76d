"""Check values of the model (scales, YaRN, Sinkhorn, Engram hashes) and a tiny configuration that exercises every part."""
import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
import config as C
import model as M
import quant as Q

COVERAGE = Path(__file__).parents[2] / "tests/data/model/coverage.json"


def spec_config():
    return C.Config.from_dict(json.loads(COVERAGE.read_text()))


def e8(x, enc):
    return int(Q.e8m0_encode(enc(torch.tensor([x] + [0.0] * 31))[1])[0])


def test_scales():
    for x, b in ((448, 127), (449, 128), (1.0, 119), (1e-4, 105), (0.0, 105)):
        assert e8(float(x), Q.fp8_row_encode) == b
    for x, b in ((6.0, 127), (6.1, 128), (1.0, 125), (0.0, 1)):
        assert e8(x, Q.mxfp4_encode) == b
    for x, b in ((6.0, 0x38), (5.0, 0x35), (0.02, 0x02), (1e-9, 0x01), (3000.0, 0x7E)):
        assert int(Q.kv4_encode(torch.tensor([x] + [0.0] * 15))[1].view(torch.uint8)[0]) == b, x


def test_yarn():
    t = C.TextConfig()
    f0 = t.compress_rope_theta ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    f = M.rope_inv_freq(t, True)
    for j, a, b in ((1, 0.687656022, 0.687656022), (15, 0.00363553858, 0.00363553858), (16, 0.0025, 0.002265625),
                    (20, 0.000559016994, 0.000296977778), (25, 8.59570027e-05, 5.37231267e-06), (31, 9.08884646e-06, 5.68052904e-07)):
        assert abs(float(f0[j]) / a - 1) < 1e-6 and abs(float(f[j]) / b - 1) < 2e-6, j


def test_sinkhorn():
    x = torch.tensor([[2, 0, 0, -1], [0, 1, 0, 0], [1, 0, 3, 0], [0, 0.5, 0, 2.0]])
    want = torch.tensor([[.6993364, .1642940, .0841595, .0522090], [.1233461, .5820218, .1096801, .1849510],
                         [.1141476, .0728954, .7499892, .0629666], [.0631688, .1807878, .0561701, .6998724]])
    assert (M.sinkhorn(x[None, None], 20, 1e-6)[0, 0] - want).abs().max() < 2e-6


def test_engram():
    rel = C.TextConfig()
    assert C.engram_multipliers(rel).tolist() == [[76632096046245, 4839876093313, 35959672319349, 73987337458391],
                                                  [67716810739261, 51510806800915, 30921347202721, 82619226485591]]
    cfg = spec_config()
    assert C.engram_multipliers(cfg.text).tolist() == [[8437364068238481, 532881113154025, 3959239832743293, 8146170270474473],
                                                       [3030781234032623, 8990863924945465, 1197684397367955, 7739849729322327]]
    m = M.Model(cfg, [i % 900 for i in range(1024)])
    e = m.layers[1].engram
    assert e.rows(torch.tensor([[[5, 7, 11, 13], [5, 0, 0, 0]]]))[0].tolist() == \
        [[376, 1898, 2794, 3621, 4766, 5527], [141, 1409, 2816, 3248, 4462, 5932]]
    p = torch.tensor(C.engram_primes(rel)[0])
    mu = torch.tensor(C.engram_multipliers(rel)[0])
    h = torch.tensor([5, 7, 11, 13]) * mu
    acc, rows, off = h[0], [], 0
    for r in range(1, 4):
        acc = acc ^ h[r]
        rows += (acc % p[r - 1]).tolist()
    flat = p.flatten()
    rows = (torch.tensor(rows) + flat.cumsum(0) - flat).tolist()
    assert rows[:4] == [6961830, 31143904, 34796895, 48021142] and rows[-2:] == [360629759, 372696692]


def test_spec_tiny_config_runs():
    cfg = spec_config()
    torch.manual_seed(0)
    m = M.Model(cfg, [i % 900 for i in range(1024)]).eval().round_to_storage()
    x = torch.randint(4, 1024, (150,))
    with torch.no_grad():
        full = m(x[None])[0]
    lg, cache = m.prefill(x[:131])
    outs = torch.stack([m.decode_step(t, cache) for t in x[131:].tolist()])
    assert (torch.cat([lg, outs]) - full).abs().max() < 1e-4
    toks, conf, _ = m.draft(5, cache)
    assert len(toks) == 5
    assert {n for n in m.storage_kinds() if "compressor.wgate" in n} == {f"layers.{i}.attn.compressor.wgate.weight" for i in (2, 4)}
