import sys, torch, torch.distributed as dist, warnings, tempfile, traceback
from torch import nn
import torch.nn.functional as F
from pathlib import Path
from tests.several_processes import found_by_each
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2,16), nn.SiLU(), nn.Sequential(nn.Linear(16,16), nn.SiLU()), nn.Linear(16,1)).double()
def run(rank, folder, found):
    import hoglib as hog
    from torch.distributed.fsdp import fully_shard
    world = dist.get_world_size()
    x = torch.randn(12,2,dtype=torch.float64, generator=torch.Generator().manual_seed(1)); f = x.flip(0)+1
    mine = slice(rank*12//world,(rank+1)*12//world)
    for pen in ("r1","zero_centred"):
      for ok in (True, False):
        for raf in (True, False):
          key = f"{pen} {ok} {raf}"
          try:
            m, ref = model(), model()
            fully_shard(m[2], reshard_after_forward=raf); fully_shard(m, reshard_after_forward=raf)
            if ok: m.set_reshard_after_backward(False)
            own = list(m.parameters())
            def loss(c, s):
                real, fake = x[s], f[s]
                p = hog.penalties.r1(c, real) if pen=="r1" else hog.penalties.wgan_gp(c, real, (real*0.5) ) if pen=="wgan_gp" else hog.penalties.zero_centred(c, real, real.clone())
                return (F.softplus(c(fake)-c(real)).mean() + 10*p)
            torch.manual_seed(3); E = torch.rand(12,1,dtype=torch.float64)
            if pen!="r1": hog.penalties.wgan_gp
            opt=torch.optim.SGD(own,0.1); opt2=torch.optim.SGD(ref.parameters(),0.1)
            for step in range(3):
                opt.zero_grad(); loss(m, mine).backward(); opt.step()
                if ok and True:
                    from torch.distributed.fsdp import FSDPModule
                    [q.reshard() for q in m.modules() if isinstance(q, FSDPModule)]
            for step in range(3): opt2.zero_grad(); loss(ref, slice(0,12)).backward(); opt2.step()
            found[key] = max((p.grad.full_tensor()-q.grad).abs().max().item() for p,q in zip(own, ref.parameters()))
          except Exception as e:
            found[key] = traceback.format_exc()[-300:]
          dist.barrier()
    m, ref = model(), model(); fully_shard(m[2]); fully_shard(m); own = list(m.parameters())
    opt=torch.optim.SGD(own,0.1); opt2=torch.optim.SGD(ref.parameters(),0.1)
    for step in range(4):
        opt.zero_grad(); opt2.zero_grad()
        a = F.softplus(m(f[mine])-m(x[mine])).mean()
        if step % 2 == 0: a = a + hog.penalties.r1_r2(m, x[mine], f[mine]) + hog.penalties.jacobian(m, x[mine], num_projections=None)
        if step == 1: hog.penalties.r1(m, x[mine])  # thrown away
        a.backward(); opt.step()
        b = F.softplus(ref(f)-ref(x)).mean()
        if step % 2 == 0: b = b + hog.penalties.r1_r2(ref, x, f)+ hog.penalties.jacobian(ref, x, num_projections=None)
        b.backward(); opt2.step()
        found[f"lazy {step}"] = [max((p.grad.full_tensor()-q.grad).abs().max().item() for p,q in zip(own, ref.parameters())), len(__import__("hoglib.penalties.sharded_critics",fromlist=["x"])._HELD), [type(p).__name__ for p in m[2].parameters()]]
if __name__=="__main__":
    with tempfile.TemporaryDirectory() as t:
        rs = found_by_each(run, Path(t), 2)
        for k, w in rs[0].items(): print(k, w)
