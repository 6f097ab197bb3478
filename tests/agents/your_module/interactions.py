"""The class of seed document 001, as it is printed there, with another import line.

The page that it stands on lost quotes, `=`, `<` and parts of the regular expression; these are put back.
"""

# ruff: noqa: I001, UP006, UP035, UP045
from workbench.agents.interactions import BaseInteraction
from typing import Optional, Dict, Any, Tuple
import re


class MathReasoningInteraction(BaseInteraction):
    def __init__(self, config: Dict[str, Any]):
        super().__init__(config)
        self._instance_dict = {}  # 存储每个 instance 的上下文信息

    async def start_interaction(self, instance_id: Optional[str] = None, **kwargs) -> str:
        """初始化交互实例"""
        if instance_id not in self._instance_dict:
            self._instance_dict[instance_id] = {
                "query": kwargs.get("query", ""),
                "ground_truth": kwargs.get("ground_truth", ""),
                "response": "",
            }
        return instance_id

    async def generate_response(
        self, instance_id: str, messages: list[dict], **kwargs
    ) -> Tuple[bool, str, float, Dict[Any, Any]]:
        """生成响应并计算奖励"""
        content = ""
        # 提取助手最后一轮回复
        for i in range(len(messages) - 1, -1, -1):
            if messages[i].get("role") == "assistant":
                content = messages[i].get("content", "")
                break
        self._instance_dict[instance_id]["response"] = content
        reward = await self.calculate_score(instance_id)
        # 根据奖励决定是否终止对话
        should_terminate_sequence = reward == 1.0
        feedback_msg = (
            "✅ 正确！你的回答完全匹配标准答案。" if should_terminate_sequence else "❌ 不完全正确，请重新思考。"
        )
        return should_terminate_sequence, feedback_msg, reward, {}

    async def calculate_score(self, instance_id: str) -> float:
        """根据响应内容与真实答案计算奖励分数"""
        entry = self._instance_dict.get(instance_id)
        if not entry or not entry["response"] or not entry["ground_truth"]:
            return 0.0
        response = entry["response"]
        ground_truth = entry["ground_truth"]
        # 提取数字答案（支持多种格式）
        pred_answer = self._extract_number(response)
        true_answer = self._extract_number(ground_truth)
        if pred_answer is None or true_answer is None:
            return 0.0
        return 1.0 if abs(pred_answer - true_answer) < 1e-6 else 0.0

    def _extract_number(self, text: str) -> Optional[float]:
        """从文本中提取最后一个出现的浮点数"""
        matches = re.findall(r"[-+]?\d*\.\d+|\d+", text.replace(",", ""))
        return float(matches[-1]) if matches else None

    async def finalize_interaction(self, instance_id: str) -> None:
        """清理交互实例"""
        if instance_id in self._instance_dict:
            del self._instance_dict[instance_id]
