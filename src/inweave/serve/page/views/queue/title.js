// The name of a job for people.
import {withoutTags} from "../../kit.js"
import {t} from "./strings.js"

/** @param {Job} job */
export function titleOf(job) {
	if (job.operation === "train") return t.training(String(job.settings.name ?? ""))
	return withoutTags(job.settings.prompt ?? "") || t.noPrompt
}
