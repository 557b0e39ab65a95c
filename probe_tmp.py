import sys, torch, torch.distributed as dist, warnings, tempfile, traceback
from torch import nn
import torch.nn.functional as F
from pathlib import Path
from tests.several_processes import found_by_each

class Net(nn.Module):
    def __init__(s):
        super().__init__()
        s.a, s.n, s.b, s.c = nn.Linear(5,7), nn.LayerNorm(7), nn.Sequential(nn.Linear(7,6),nn.Tanh(), nn.Linear(6,7)), nn.Linear(7,3)
    def forward(s, x):
        x = s.a(x).tanh(); return s.c(x + s.b(s.n(x)))
def model(dtype=torch.float64):
    torch.manual_seed(0)
    return Net().to(dtype)

def run(rank, folder, found):
    import hoglib as hog
    from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy, FullyShardedDataParallel
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor, DTensor
    from torch.distributed.tensor.parallel import parallelize_module, ColwiseParallel, RowwiseParallel
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    world = dist.get_world_size()
    hsdp = init_device_mesh("cpu", (2,2), mesh_dim_names=("r","s"))
    two = init_device_mesh("cpu", (2,2), mesh_dim_names=("dp","tp"))
    x = torch.randn(12,5,dtype=torch.float64, generator=torch.Generator().manual_seed(1)); y = torch.arange(12)%3
    def cases():
        m = model(); fully_shard(m.b, mesh=hsdp); fully_shard(m, mesh=hsdp); yield "hsdp", m, slice(rank*3,rank*3+3), torch.float64
        m = model(); parallelize_module(m, two["tp"], {"a": ColwiseParallel(output_layouts=__import__("torch.distributed.tensor",fromlist=["Replicate"]).Replicate()), "b.0": ColwiseParallel(), "b.2": RowwiseParallel()}); yield "tp", m, slice(0,12), torch.float64
        m = model(); parallelize_module(m, two["tp"], {"b.0": ColwiseParallel(), "b.2": RowwiseParallel()}); fully_shard(m.b, mesh=two["dp"]); fully_shard(m, mesh=two["dp"]);d = two.get_local_rank("dp"); yield "fsdp+tp", m, slice(6*d,6*d+6), torch.float64
        m = model(); m.b = checkpoint_wrapper(m.b); fully_shard(m.b, mesh=hsdp); fully_shard(m, mesh=hsdp); yield "ckpt", m, slice(rank*3,rank*3+3), torch.float64
        m = model(torch.float32); mp=MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32); fully_shard(m.b, mesh=hsdp, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)); fully_shard(m, mesh=hsdp, mp_policy=mp); yield "mp", m, slice(rank*3,rank*3+3), torch.float32
        m = model(); m.a.requires_grad_(False); fully_shard(m.b, mesh=hsdp, reshard_after_forward=False); fully_shard(m, mesh=hsdp, ignored_params=set(m.n.parameters())); yield "frozen, ignored", m, slice(rank*3,rank*3+3), torch.float64
        m = nn.parallel.DistributedDataParallel(model()); yield "ddp", m, slice(0,12), torch.float64
    for name, m, mine, dtype in cases():
        ref = model(dtype)
        params = hog.trainable_params(m)
        g = torch.Generator().manual_seed(2)
        rp = {n:p for n,p in ref.named_parameters() if name[:6]!="frozen" or n[0]!="a"}
        V = {n: torch.randn(p.shape, dtype=dtype, generator=g) for n,p in rp.items()}
        real = lambda n: n.replace("_checkpoint_wrapped_module.","").replace("module.","")
        L, Lr = hog.functional_loss(m, F.cross_entropy), hog.functional_loss(ref, F.cross_entropy)
        xx = x.to(dtype)
        for kind, f in {"rr": lambda l,p,v,b: hog.hvp(l,p,v,b), "fr": lambda l,p,v,b: hog.hvp(l,p,v,b,mode="forward-over-reverse"), "fd": lambda l,p,v,b: hog.hvp(l,p,v,b,mode="finite-differences"), "ggn": lambda l,p,v,b: hog.ggn_vp(l,p,v,b)}.items():
          try:
            v = {};
            for i,(n,p) in enumerate(params.items()): torch.manual_seed(i); v[n] = torch.randn_like(p.detach())
            V = {real(n): p.full_tensor() if isinstance(p,DTensor) else p for n,p in v.items()}; rp={real(n): rp[real(n)] for n in params}
            val, got = f(L, params, v, (xx[mine],y[mine]))
            val0, want = f(Lr, rp, V, (xx,y))
            scale = max(w.abs().max().item() for w in want.values())
            found[name+" "+kind] = [abs(float(val-val0)), max(((got[n].full_tensor() if isinstance(got[n],DTensor) else got[n])-want[real(n)]).abs().max().item() for n in got)/scale, str([p.placements for p in params.values() if isinstance(p,DTensor)][:3])]
          except Exception as e:
            found[name+" "+kind] = traceback.format_exc()[-700:]
if __name__=="__main__":
    with tempfile.TemporaryDirectory() as t:
        rs = found_by_each(run, Path(t), 4)
        for k, w in rs[0].items(): print(k, w)
