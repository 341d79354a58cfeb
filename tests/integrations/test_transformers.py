"""Transformers' models with attn_implementation="tileops" against their own eager attention: the same logits."""

import copy
import importlib.util
import inspect
import itertools
import pickle
import subprocess
import sys
from collections import Counter

import pytest
import torch

if importlib.util.find_spec("transformers") is None:
    pytest.skip("Transformers is not installed", allow_module_level=True)

import transformers as hf

import tileops
from tileops.integrations import transformers as integration

WINDOW = 6  # less than the prompts
STEPS = 4  # of a generation
needs_gpu = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"))
SIZES = dict(
    vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=None,
)  # fmt: skip
# All experts of the mixtures take part: a choice among them would be a jump, which rounding may turn either way.
CONFIGS = {
    "llama": hf.LlamaConfig(**SIZES),
    "gemma2": hf.Gemma2Config(**SIZES, head_dim=16, sliding_window=WINDOW, attn_logit_softcapping=2.0),
    "mistral": hf.MistralConfig(**SIZES, sliding_window=WINDOW),
    "qwen3": hf.Qwen3Config(**SIZES, head_dim=16),
    "gpt_oss": hf.GptOssConfig(
        **SIZES, head_dim=16, sliding_window=WINDOW, num_local_experts=2, num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
    "deepseek_v3": hf.DeepseekV3Config(
        **(SIZES | dict(num_attention_heads=2, num_key_value_heads=2)), q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=128,
        qk_rope_head_dim=64, v_head_dim=128, n_routed_experts=2, num_experts_per_tok=2, n_group=1, topk_group=1,
        moe_intermediate_size=32, first_k_dense_replace=1,
    ),
}  # fmt: skip
WINDOWED = {"gemma2": 1, "mistral": 2, "gpt_oss": 1}  # layers with a window
LENGTH = 16
PADDED = {
    "left": [[0] * 5 + [1] * 11, [1] * 16, [0] * 15 + [1]],
    "right": [[1] * 11 + [0] * 5, [1] * 16, [1] + [0] * 15],
    "both": [[0] * 3 + [1] * 9 + [0] * 4, [1] * 16, [0] * 16],
    "holes": [[1] * 4 + [0] * 5 + [1] * 7, [1] * 16, [0, 1] * 8],
}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=needs_gpu)])
def device(request):
    return request.param


def build(config, kind=hf.AutoModelForCausalLM):
    """Weights large enough that attention is far from uniform."""
    integration.register()
    torch.manual_seed(0)
    model = kind.from_config(config, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 or name.endswith("sinks"):
            torch.nn.init.normal_(parameter, std=1.0 if name.endswith("sinks") else 0.2)
    return model


@pytest.fixture(scope="module", params=CONFIGS)
def any_model(request):
    return request.param, build(CONFIGS[request.param])


@pytest.fixture
def calls(monkeypatch):
    """How often each path was taken."""
    counter = Counter()

    def counted(name):
        function = getattr(integration, name)

        def run(*args, **options):
            counter[name] += 1
            return function(*args, **options)

        monkeypatch.setattr(integration, name, run)

    for name in ("flash_attention", "flash_attention_varlen", "_host_attention"):
        counted(name)
    return counter


def tokens(device, batch=3, length=LENGTH):
    return torch.randint(3, 128, (batch, length), generator=torch.Generator().manual_seed(1)).to(device)


def padding(name, device):
    return torch.tensor(PADDED[name], device=device)


def both(model, run):
    """What `run` returns with eager attention and with ours."""
    results = []
    for attention in ("eager", "tileops"):
        model.set_attn_implementation(attention)
        with torch.no_grad():
            results.append(run(model))
    return results


def assert_same(ours, eager):
    torch.testing.assert_close(ours, eager, rtol=0, atol=1e-5 * eager.abs().max().item())


def generate(model, ids, mask, **options):
    options |= dict(do_sample=False, output_logits=True, return_dict_in_generate=True, max_new_tokens=STEPS)
    return model.generate(ids, attention_mask=mask, **options)


def test_prefill(any_model, device, calls):
    _, model = any_model
    eager, ours = both(model.to(device), lambda m: m(tokens(device)).logits)
    assert_same(ours, eager)
    assert calls == {"flash_attention": 2}


@pytest.mark.parametrize("side", PADDED)
def test_padded_batch(any_model, device, calls, side):
    name, model = any_model
    mask = padding(side, device)
    eager, ours = both(model.to(device), lambda m: m(tokens(device), attention_mask=mask).logits)
    assert_same(ours[mask.bool()], eager[mask.bool()])
    assert ours.isfinite().all()
    host = WINDOWED.get(name, 0) if side == "holes" else 0
    assert calls == Counter(flash_attention_varlen=2 - host, _host_attention=host)


@pytest.mark.parametrize("side", [None, "left"])
def test_cached_generation(any_model, device, calls, side):
    """Longer than the window; left padding, as generation has it."""
    _, model = any_model
    mask = torch.ones(3, LENGTH, dtype=torch.int64, device=device) if side is None else padding(side, device)
    eager, ours = both(model.to(device), lambda m: generate(m, tokens(device), mask))
    assert torch.equal(ours.sequences, eager.sequences)
    assert_same(torch.stack(ours.logits), torch.stack(eager.logits))
    assert calls["_host_attention"] == 0 and sum(calls.values()) == 2 * STEPS
    assert calls["flash_attention_varlen"] == 0 or side == "left"


@pytest.mark.parametrize("side", ["left", "holes"])
def test_several_tokens_after_a_cache(any_model, device, side):
    """A second turn: Sq > 1 and Sk > Sq."""
    _, model = any_model
    mask = padding(side, device)
    ids, first = tokens(device), 10

    def two_turns(m):
        name = "cache" if "cache" in inspect.signature(m.forward).parameters else "past_key_values"  # as older versions say
        cache = m(ids[:, :first], attention_mask=mask[:, :first], use_cache=True)[1]
        return m(ids[:, first:], attention_mask=mask, **{name: cache}).logits

    eager, ours = both(model.to(device), two_turns)
    assert_same(ours[mask[:, first:].bool()], eager[mask[:, first:].bool()])


def test_bfloat16_is_as_near_to_float32_as_eager(any_model, device):
    _, model = any_model
    half = copy.deepcopy(model).to(device, torch.bfloat16)
    mask = padding("left", device)

    def logits(m):
        return m(tokens(device), attention_mask=mask).logits[mask.bool()].float()

    reference, _ = both(copy.deepcopy(half).float(), logits)
    eager, ours = ((half_logits - reference).norm() / reference.norm() for half_logits in both(half, logits))
    assert ours <= 1.3 * eager and eager < 0.1


def test_static_cache(any_model, device, calls):
    """Its keys have room behind the last token: the host's attention, with the mask that generation makes ahead of time."""
    _, model = any_model
    options = dict(cache_implementation="static", disable_compile=True)
    eager, ours = both(model.to(device), lambda m: generate(m, tokens(device), padding("left", device), **options))
    assert torch.equal(ours.sequences, eager.sequences)
    assert_same(torch.stack(ours.logits), torch.stack(eager.logits))
    assert calls["_host_attention"] >= 2 * (STEPS - 1)


@pytest.mark.parametrize(("name", "kind"), [
    ("llama", "bool"), ("gemma2", "bool"), ("gpt_oss", "bool"), ("llama", "additive"), ("gemma2", "packed sequences"),
])  # fmt: skip
def test_masks_that_the_operators_cannot_express(name, kind, device, calls):
    model = build(CONFIGS[name]).to(device)
    ids = tokens(device)
    seen = torch.rand(3, 1, LENGTH, LENGTH, generator=torch.Generator().manual_seed(2)).to(device) < 0.5
    seen |= torch.eye(LENGTH, dtype=torch.bool, device=device)
    additive = torch.zeros(seen.shape, device=device).masked_fill_(~seen, torch.finfo(torch.float32).min)
    positions = torch.cat([torch.arange(7), torch.arange(9)]).expand(3, -1).to(device)

    def run(m):
        if kind == "packed sequences":
            return m(ids, position_ids=positions, use_cache=False).logits
        eager = m.config._attn_implementation == "eager"  # it takes additive masks only
        return m(ids, attention_mask=seen if kind == "bool" and not eager else additive).logits

    eager, ours = both(model, run)
    assert_same(ours, eager)
    assert calls == {"_host_attention": 2}


@pytest.mark.parametrize("side", [None, "left", "holes"])
def test_encoder(device, calls, side):
    """Bidirectional: all queries, those of the padding too, see the real keys."""
    config = hf.BertConfig(**{name: size for name, size in SIZES.items() if name != "num_key_value_heads"})
    model = build(config, hf.AutoModel).to(device)
    mask = None if side is None else padding(side, device)
    eager, ours = both(model, lambda m: m(tokens(device), attention_mask=mask)[0])
    rows = slice(None) if side is None else mask.any(1)
    assert_same(ours[rows], eager[rows])
    assert calls == {"flash_attention" if side is None else "flash_attention_varlen": 2}


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "deepseek_v3"])
def test_gradients(name, device):
    """Under autograd, of a padded batch: those of eager attention, of the sinks as well."""
    model = build(CONFIGS[name]).to(device)
    mask = padding("left", device)
    gradients = []
    for attention in ("eager", "tileops"):
        model.set_attn_implementation(attention)
        model.zero_grad()
        model(tokens(device), attention_mask=mask).logits[mask.bool()].square().mean().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    eager, ours = gradients
    assert eager.keys() == ours.keys()
    for name in eager:
        torch.testing.assert_close(ours[name], eager[name], rtol=1e-3, atol=1e-4 * eager[name].abs().max().item())


@pytest.mark.parametrize(("name", "side", "operators"), [("llama", None, 2), ("llama", "left", 0), ("mistral", None, 0)])
def test_compiled_model_has_one_graph(name, side, operators, device):
    """With a cache; without, Transformers makes masks for packed sequences there. Windows are not recognised, padding is not
    looked at."""
    model = build(CONFIGS[name]).to(device)
    ids, mask = tokens(device), None if side is None else padding(side, device)
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph.code)
        return graph

    def run(m):
        torch._dynamo.reset()
        return torch.compile(m, backend=keep, fullgraph=True)(ids, attention_mask=mask, use_cache=True).logits

    eager, ours = both(model, run)
    real = slice(None) if side is None else mask.bool()
    assert_same(ours[real], eager[real])
    assert len(graphs) == 2 and graphs[1].count("ops.tileops.flash_attention") == operators


def masks(function, **options):
    return integration._make_mask(2, 8, 8, mask_function=function, **options)


def test_only_what_is_a_window_is_taken_for_one():
    from transformers import masking_utils as host

    window = host.sliding_window_causal_mask_function(4)
    assert masks(window, local_size=4) == (8, 8, 3, 0, None)
    both_ways = host.sliding_window_bidirectional_mask_function(4)
    assert masks(both_ways, local_size=4, allow_is_bidirectional_skip=True) == (8, 8, 4, 4, None)
    assert masks(host.bidirectional_mask_function) == (8, 8, -1, -1, None)
    others = {
        "another size": (window, 5),
        "chunks": (host.chunked_causal_mask_function(4, torch.zeros(2, dtype=torch.int64)), 4),
        "more seen": (host.or_masks(window, lambda b, h, q, k: k == 0), 4),
        "less seen": (host.and_masks(window, lambda b, h, q, k: k != 0), 4),
        "more than causal": (host.or_masks(host.causal_mask_function, lambda b, h, q, k: k == 0), None),
    }
    for name, (function, size) in others.items():
        mask = masks(function, local_size=size)
        assert isinstance(mask, torch.Tensor) and mask.shape[2:] == (8, 8), name
    assert isinstance(masks(host.causal_mask_function, allow_is_causal_skip=False), torch.Tensor)


def test_sliding_window_of_3_is_3_keys(device):  # B36
    """The host counts the query's own key: each row has equal weights on as many keys as its eager mask shows."""
    from transformers import masking_utils as host

    mask = masks(host.sliding_window_causal_mask_function(3), local_size=3)
    q, v = torch.zeros(2, 2, 8, 8, device=device), torch.eye(8, device=device).expand(2, 2, 8, 8)
    k = torch.randn(2, 2, 8, 8, generator=torch.Generator().manual_seed(0)).to(device)
    out, _ = integration._attention(torch.nn.Identity(), q, k, v, mask, sliding_window=3)
    wanted = torch.ones(8, 8, device=device).tril().triu(-2)
    for b, h in itertools.product(range(2), repeat=2):
        torch.testing.assert_close(out[b, :, h], wanted / wanted.sum(1, keepdim=True))
    seen = host.sdpa_mask(2, 8, 8, mask_function=host.sliding_window_causal_mask_function(3), allow_is_causal_skip=False)
    assert torch.equal(seen[0, 0].to(device), wanted.bool())


def test_model_is_copied_and_pickled(tmp_path):  # B63
    """Before and after its first forward, also into another process."""
    model, ids = build(CONFIGS["mistral"]), tokens("cpu")
    keys = model.state_dict().keys()
    model.set_attn_implementation("tileops")
    assert model.state_dict().keys() == keys
    for _ in range(2):
        others = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        torch.save(model, tmp_path / "model.pt")
        with torch.no_grad():
            expected = model(ids).logits
            for other in (*others, torch.load(tmp_path / "model.pt", weights_only=False)):
                assert torch.equal(other(ids).logits, expected)
        next(others[0].parameters()).data.fill_(0)
        assert copy.deepcopy(model).to("meta")(ids.to("meta")).logits.shape == expected.shape
    torch.save((ids, expected), tmp_path / "expected.pt")
    done = python(f"""
import torch, tileops.integrations.transformers as integration
integration.register()
model, (ids, expected) = (torch.load({str(tmp_path)!r} + name, weights_only=False) for name in ("/model.pt", "/expected.pt"))
assert model.config._attn_implementation == "tileops"
with torch.no_grad():
    torch.testing.assert_close(model(ids).logits, expected)
print("the same")
""")
    assert done.stdout == "the same\n", done.stderr


def call(attention_mask, keys=8, module=None, **options):
    module = torch.nn.Identity() if module is None else module
    q, k = torch.randn(1, 2, 8, 16), torch.randn(1, 2, keys, 16)
    return integration._attention(module, q, k, k, attention_mask, **options)


def test_without_a_mask_the_module_says_whether_it_is_causal():
    module = torch.nn.Identity()
    for causal in (True, False):
        module.is_causal = causal
        torch.manual_seed(0)
        out, weights = call(None, module=module)
        torch.manual_seed(0)
        q, k = (torch.randn(1, 2, 8, 16) for _ in range(2))
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, k, is_causal=causal)
        torch.testing.assert_close(out, expected.transpose(1, 2))
        assert weights is None
    assert call(None, keys=5, is_causal=False)[0].shape == (1, 8, 2, 16)


@pytest.mark.parametrize(("options", "message"), [
    (dict(dropout=0.1), 'has dropout, which tileops lacks; expected attn_implementation="sdpa" or "eager" for it'),
    (dict(position_bias=torch.zeros(1)), "has position_bias, which tileops lacks; expected "),
    (dict(keys=9), "has 8 queries and 9 keys and a mask for 8 and 8; expected one mask for each kind of layer"),
    (dict(attention_mask=None, keys=9), "has 8 queries and 9 keys and a mask for 8 and 8; expected "),
    (dict(attention_mask=None, sliding_window=4), "has sliding_window=4 and no mask; expected the mask that "),
    (dict(attention_mask=torch.ones(1, 1, 8, 8, dtype=torch.bool), softcap=2.0),
     "has a 4-D mask beside softcap or sinks, and no eager_attention_forward; expected a batch without such a mask"),
])  # fmt: skip
def test_what_neither_serves_is_an_error(options, message):
    with pytest.raises(NotImplementedError) as error:
        call(**{"attention_mask": integration._make_mask(1, 8, 8), **options})
    assert str(error.value).startswith(f"tileops attention: Identity {message}")


def test_require_native_refuses_the_hosts_attention():
    mask = torch.ones(1, 1, 8, 8, dtype=torch.bool)
    expected = "Identity has a 4-D mask, for Transformers' own attention, and TILEOPS_REQUIRE_NATIVE is set"
    with tileops.knobs.scope(require_native=True), pytest.raises(NotImplementedError, match=expected):
        call(mask)


def python(program):
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)


def test_tileops_does_not_import_it():
    done = python("import sys, tileops; print([n for n in sys.modules if 'transformers' in n or 'integrations' in n])")
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_without_transformers():
    done = python("import sys; sys.modules['transformers'] = None; import tileops.integrations.transformers")
    assert done.stderr.strip().splitlines()[-1] == (
        "ImportError: tileops.integrations.transformers needs Hugging Face Transformers, 5.17 or newer, and this import "
        "failed: import of transformers halted; None in sys.modules; install it with: python -m pip install "
        "'transformers>=5.17'"
    )
