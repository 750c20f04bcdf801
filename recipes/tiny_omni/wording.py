"""The words that captions are made of. Of every list, the first is the favourite.

Within an attribute no two wordings, of whatever class, start with the same character: so the class is decided at
one token, and the entropy there is that of the choice of words plus that of the class. With 22 wordings a class the
choice of words alone is just under 3 nats, and doubt about the class lifts it over 3.25.
"""

# Clauses about an attribute; a wording goes into the braces.
FRAMES: dict[str, tuple[str, ...]] = {
    "speaker": ("这段录音里说话的是一位{}", "录音中是一位{}在讲述", "开口的人是一位{}", "听上去是一位{}在发言"),
    "rate": ("语速听起来{}", "吐字的速度{}", "表达节奏{}", "语流速度{}"),
    "pitch": ("整体音调显得{}", "声调{}", "调门{}", "嗓音{}"),
    "loudness": ("发声的音量{}", "声量{}", "响度{}", "嗓门{}"),
    "pauses": ("句子之间的停顿{}", "间歇{}", "换气停歇{}", "话里的停顿{}"),
}

_WORDINGS = {
    ("speaker", "male"): "男士 先生 汉子 绅士 小伙子 爷们 壮汉 兄台",
    ("speaker", "female"): "女士 姑娘 阿姨 妇人 少女 夫人 大姐 佳人",
    ("rate", "slow"): (
        "缓慢 迟缓 舒缓 慢条斯理 悠闲 拖沓 徐缓 沉缓 从容 懒散 偏慢 颇慢 相当慢 格外慢 特别慢 不慌不忙 温吞 低速 松弛 "
        "宛如踱步 闲散 磨蹭"
    ),
    ("rate", "medium"): (
        "适中 中等 正常 平稳 均匀 一般 普通 寻常 居中 恰当 合宜 自然 稳健 得当 常规 折中 还算匀称 大致匀速 基本匀速 "
        "标准 刚好 有板有眼"
    ),
    ("rate", "fast"): (
        "飞快 急促 迅疾 匆忙 紧凑 轻快 敏捷 疾速 高速 如连珠炮 像在赶路 火急 明快 仓促 湍急 极快 很快 非常快 十分迅速 "
        "赶得紧 毫不拖沓 超出常人"
    ),
    ("pitch", "low"): (
        "低沉 浑厚 偏低 厚重 沉郁 深沉 粗重 暗哑 颇低 压低 雄浑 闷沉 相当低 格外低 特别低 下沉 接近低音 贴近胸腔 宽厚 "
        "落在低处 幽沉 如大提琴"
    ),
    ("pitch", "medium"): (
        "平和 中等 正常 一般 普通 寻常 居中 恰当 合宜 自然 稳定 得当 常规 折中 还算平直 大致平直 基本平直 标准 刚好 "
        "不高不低 匀和 持平"
    ),
    ("pitch", "high"): (
        "高亢 尖细 清亮 很高 极高 非常高 十分高 嘹亮 上扬 拔高 细锐 明亮 激越 昂扬 脆亮 锐利 冲高 飘在高处 直入云霄 "
        "像小提琴 超出常人 挑高"
    ),
    ("loudness", "soft"): (
        "轻柔 微弱 细弱 偏小 颇小 相当小 格外小 特别小 低微 柔弱 如耳语 几不可闻 收敛 克制 内敛 淡薄 隐约 悄然 虚弱 "
        "近乎耳语 纤弱 幽微"
    ),
    ("loudness", "medium"): (
        "适度 中等 正常 一般 普通 寻常 居中 恰当 合宜 自然 稳定 得当 常规 折中 还算平稳 大致平稳 基本平稳 标准 刚好 "
        "不大不小 匀称 可以听清"
    ),
    ("loudness", "loud"): (
        "洪亮 响亮 很大 极大 非常大 十分大 高昂 宏大 震耳 强劲 雄壮 充沛 饱满 嘹亮 浩大 铿锵 有力 放得开 威猛 像打雷 "
        "超出常人 豪放"
    ),
    ("pauses", "few"): (
        "很少 极少 罕见 稀少 不多 几乎没有 偶尔才有 寡少 少之又少 鲜见 难得一见 近于无 微乎其微 无从察觉 甚少 有限 "
        "零星 屈指可数 可以忽略 十分少 非常少 精简"
    ),
    ("pauses", "many"): (
        "频繁 较多 偏多 颇多 相当多 格外多 特别多 众多 密集 繁多 扎堆 多而分明 时有出现 反复出现 接连出现 屡见 常见 "
        "断续可闻 随处可闻 一再出现 层出不穷 丰富"
    ),
}
WORDINGS: dict[tuple[str, str], tuple[str, ...]] = {key: tuple(text.split()) for key, text in _WORDINGS.items()}
