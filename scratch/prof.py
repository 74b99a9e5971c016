import sys, torch
sys.path.insert(0,'benchmarks')
import nets, methods
torch.backends.cuda.matmul.allow_tf32=True; torch.backends.cudnn.allow_tf32=True; torch.backends.cudnn.benchmark=True
D={'bf16':torch.bfloat16,'float32':torch.float32}
name,dt,m=sys.argv[1:4]
net,xs,ys=nets.problem(name,small=False,dtype=D[dt],device='cuda'); w=nets.TABLE[name].weight
step=methods.build(m,net,xs[0],ys[0],w)
for i in range(6): net.zero_grad(set_to_none=True); step(xs[0],ys[0])
from torch.profiler import profile, ProfilerActivity
with profile(activities=[ProfilerActivity.CUDA]) as p:
    for i in range(3): net.zero_grad(set_to_none=True); step(xs[0],ys[0])
    torch.cuda.synchronize()
ev=sorted(p.key_averages(),key=lambda e:-e.self_device_time_total)
print(name,dt,m,'busy ms',sum(e.self_device_time_total for e in ev)/3e3,'kernels',sum(e.count for e in ev)//3)
for e in ev[:26]: print(f'{e.self_device_time_total/3e3:8.3f} {e.count//3:5d}  {e.key[:110]}')
